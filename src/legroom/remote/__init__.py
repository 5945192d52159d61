"""Objects in remote storage, through fsspec: S3, Google Cloud Storage, the Hugging Face Hub, HTTP, any known protocol.

remote_object               URL of an object, its text without credentials, which version of it was seen
object_store                ask about an object, read ranges of it, list a pattern
http_connections            one range over HTTP, from a socket straight into the caller's buffer
conditional_range_requests  one range of an object bound to one version: by http_connections, or by fsspec's own call
remote_errors_and_retries   what went wrong, without credentials; which failures are worth another request
"""
