"""The processes of a tensor parallel network."""
