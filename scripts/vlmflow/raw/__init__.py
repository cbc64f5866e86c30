"""Reads the rows of raw files of every format, one after the other, and decides which of them are used."""
