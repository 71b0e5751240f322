"""What a layer group sees: block tables, attention windows, slot mappings."""
