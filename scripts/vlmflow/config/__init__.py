"""What may be configured: the settings, where things come from, and what is said of a fault."""
