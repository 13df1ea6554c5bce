"""The typed client of a gateway over HTTP: sessions, calls, streams, files, results. The base install is enough for it.

The tree of its errors is drawn in `gateway.client.errors`.
"""

from gateway.client.client import DEFAULT_URL as DEFAULT_URL
from gateway.client.client import Client as Client
from gateway.client.client import Endpoint as Endpoint
from gateway.client.client import endpoint as endpoint
from gateway.client.errors import ArchiveRefused as ArchiveRefused
from gateway.client.errors import ClientError as ClientError
from gateway.client.errors import ConnectionLost as ConnectionLost
from gateway.client.errors import Forbidden as Forbidden
from gateway.client.errors import GatewayUnreachable as GatewayUnreachable
from gateway.client.errors import Gone as Gone
from gateway.client.errors import NotFound as NotFound
from gateway.client.errors import Refused as Refused
from gateway.client.errors import StreamInterrupted as StreamInterrupted
from gateway.client.errors import TooMany as TooMany
from gateway.client.errors import Unauthorized as Unauthorized
from gateway.client.results import FileInfo as FileInfo
from gateway.client.results import ResultInfo as ResultInfo
from gateway.client.session import Session as Session
from gateway.client.stream import Chunk as Chunk
from gateway.client.stream import StreamedCall as StreamedCall
from gateway.client.turn import Step as Step
from gateway.client.turn import Turn as Turn
from gateway.wire import FileEntry as FileEntry
from gateway.wire import FileList as FileList
from gateway.wire import Page as Page
from gateway.wire import SignedUrl as SignedUrl
from gateway.wire import StoredResultEntry as StoredResultEntry
