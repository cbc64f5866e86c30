"""Reports for people: pages, summary, provenance, model card."""
