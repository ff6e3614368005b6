"""Every number twice: for people (console, TensorBoard, sample grids) and for programs (stats.jsonl, result.json)."""
