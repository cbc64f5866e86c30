"""The raw forms, one module each; `config.raw_forms` finds them, and says what their FORM holds."""
