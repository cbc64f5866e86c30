"""Pictures from where they lie: which source has them, the cheapest way there, and an account of what came."""
