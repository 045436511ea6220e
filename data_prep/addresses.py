"""The address of a file on a server: its parts, and how it is printed without the secrets in its query."""

from __future__ import annotations

import re
from dataclasses import dataclass

OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"}  # an object appears only when it is complete
VERSION = "?versionId="
MARKS = {"http": "?", "https": "?", "s3": VERSION, "s3a": VERSION}  # what begins a query
QUERY = re.compile(r"(://[^\s?]*)\?\S*")
# What differs each time an address is signed: the parameters of S3, Google Cloud, CloudFront and Azure.
SIGNATURE = re.compile(
    r"(x-amz-.*|x-goog-.*|awsaccesskeyid|googleaccessid|signature|expires|policy|key-pair-id"
    r"|sig|sv|st|se|sr|sp|spr|sip|skoid|sktid|skt|ske|sks|skv)=.*",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Address:
    """A file of a server: ``folder``/``name``, and what follows it, such as ``?versionId=…`` or a signature."""

    folder: str
    name: str
    query: str  # with its question mark; empty if there is none

    @property
    def shown(self) -> str:
        """The address as it may be printed: a query can be the key to a private file."""
        return without_query(f"{self.folder}/{self.name}{self.query}")

    @property
    def lasting(self) -> str:
        """The address without its signature: the same for the same file each time it is signed."""
        kept = "&".join(part for part in self.query[1:].split("&") if not SIGNATURE.fullmatch(part))
        return f"{self.folder}/{self.name}" + (f"?{kept}" if kept else "")


def read_address(text: str) -> Address:
    """Splits an address. An S3 key, or a name on another server, may itself contain a question mark."""
    mark = MARKS.get(text.partition("://")[0])
    place, found, query = text.partition(mark) if mark else (text, "", "")
    folder, _, name = place.rpartition("/")
    return Address(folder, name, found + query)


def without_query(address: str) -> str:
    """The address with an ellipsis in place of its query."""
    place, found, _ = address.partition("?")
    return place + (found and "?…")


def hide_queries(text: str) -> str:
    """The text with an ellipsis in place of the query of each address in it. An address ends at a space."""
    return QUERY.sub(r"\1?…", text)
