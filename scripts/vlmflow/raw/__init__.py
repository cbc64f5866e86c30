"""Raw files of every format: their rows, one after the other, and which of them are used."""
