"""The results of a run: records, latencies, fairness, the result file and comparisons."""
