"""The configuration: its settings and their checks, the repository's tables, and the messages about errors."""
