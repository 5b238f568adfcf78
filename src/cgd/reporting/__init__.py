"""Layer 7, reports for people: charts, pages and the file that the report of a run is made from."""
