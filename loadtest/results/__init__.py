"""What came of a run: records, latencies, fairness, the result file and comparisons."""
