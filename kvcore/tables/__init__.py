"""The tables of layer groups: block tables, attention windows, slot mappings."""
