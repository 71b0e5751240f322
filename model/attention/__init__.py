"""From a step's block tables to the attention of a Transformers network."""
