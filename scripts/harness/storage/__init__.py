"""How targets reach their storage, whole or not at all, in the place of the storage plugins' own steps."""
