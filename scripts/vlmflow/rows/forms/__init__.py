"""The raw forms, one module each, which defines FORM; see `config.raw_forms`."""
