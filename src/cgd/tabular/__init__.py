"""Layer 8, tables: reading, preprocessing, training, saving and prediction."""

from cgd.extras import require

require("tables", "working with tables")
