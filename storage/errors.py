"""Errors of the storage.

StorageError
├── DatabaseUnavailableError (OSError)      cannot be opened, is locked, read-only, or of a newer schema
├── DamagedRowError          (ValueError)   a row of a job cannot be read
├── UnknownJobError          (LookupError)  no job has that id
├── UnknownTrialError        (LookupError)  the job has no such trial, or no such attempt
├── JobStateError            (ValueError)   the requested change does not fit the job's state
├── SubmissionConflictError  (ValueError)   the key of a submission was used with another body
├── UnknownKeyError          (LookupError)  no API key has that id
├── UnknownWebhookError      (LookupError)  no webhook has that id
├── QuotaExceededError       (ValueError)   an owner has used up a quota
├── SecretError              (ValueError)   a secret cannot be encrypted or decrypted with the available keys
├── TransferError            (ValueError)   a file of rows cannot be read into this database
├── LeaseHeldError           (RuntimeError) another live process holds the job
└── LeaseLostError           (RuntimeError) the lease expired or was taken over: stop writing
"""


class StorageError(Exception):
    """Base of all errors of this package. Each message is one line that names the remedy."""


class DatabaseUnavailableError(StorageError, OSError):
    """The database cannot be opened, is locked or read-only, or has a newer schema than this version knows."""


class DamagedRowError(StorageError, ValueError):
    """A row of one job cannot be read. Other jobs are not affected."""


class UnknownJobError(StorageError, LookupError):
    """No job has that id, or there is no job at all."""


class UnknownTrialError(StorageError, LookupError):
    """The job has no trial with that number or no attempt with that token, or the trial accepts no further attempts."""


class JobStateError(StorageError, ValueError):
    """The requested change does not fit the job's state."""


class SubmissionConflictError(StorageError, ValueError):
    """The key of a submission was used before, with another body."""


class UnknownKeyError(StorageError, LookupError):
    """No API key has that id."""


class UnknownWebhookError(StorageError, LookupError):
    """No webhook has that id."""


class QuotaExceededError(StorageError, ValueError):
    """An owner has used up a quota."""

    def __init__(self, quota: str, used: float, most: float, remedy: str) -> None:
        super().__init__(f"quota: {quota} is used up ({used:,.10g} of {most:,.10g}); {remedy}")
        self.quota, self.used, self.most, self.remedy = quota, used, most, remedy


class SecretError(StorageError, ValueError):
    """A secret cannot be encrypted or decrypted with the available keys."""


class TransferError(StorageError, ValueError):
    """A file of rows is invalid, truncated, of another version, or has rows that exist here already."""


class LeaseHeldError(StorageError, RuntimeError):
    """Another live process holds the job."""


class LeaseLostError(StorageError, RuntimeError):
    """The lease expired or was taken over by another process; nothing may be written under it."""
