"""The report: charts, HTML pages and text, also of `tiercel simulate`."""
