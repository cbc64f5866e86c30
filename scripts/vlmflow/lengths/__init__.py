"""The token lengths of rows: counts them, compares them with ms-swift's own, and makes rows fit."""
