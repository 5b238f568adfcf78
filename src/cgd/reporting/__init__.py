"""Layer 7, reports: charts, HTML pages and the file `run.json`."""

from cgd.extras import require

require("tables", "writing reports")
