"""Evaluation: fidelity to the full cache and answers, intervals, tables, pictures and reports."""
