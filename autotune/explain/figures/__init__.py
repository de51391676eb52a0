"""The figures of a job as plain data, which the web page's program draws on the page, in reports and in notebooks."""
