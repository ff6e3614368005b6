"""Reports a run twice: to people (console, TensorBoard, sample grids) and to programs (stats.jsonl,
result.json)."""
