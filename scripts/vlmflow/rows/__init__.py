"""The rows: raw, converted, judged, accounted for."""
