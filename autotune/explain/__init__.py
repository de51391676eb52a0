"""What a job found, explained: findings, figures and reports."""
