"""Reports on finished runs: scores, throughput, precisions compared, and the pages that show
them.
"""
