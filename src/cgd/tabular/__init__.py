"""Layer 8, from a table to a model: reading, preparing, training, saving, predicting."""
