"""What people read of a run: pages, summary, provenance, model card."""
