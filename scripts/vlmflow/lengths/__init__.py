"""How many tokens rows have: counted, compared with ms-swift's own, and made to fit."""
