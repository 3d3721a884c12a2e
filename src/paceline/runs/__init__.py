"""A run as files: its folder, documents, figures, journal and provenance."""
