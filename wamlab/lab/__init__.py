"""Run folders, live plots and reports: reads and writes files, never tensors, so a laptop can watch a run."""
