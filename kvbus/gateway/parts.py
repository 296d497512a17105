"""The running parts of one gateway, as its routes see them; made once, in `serving.py`."""

from dataclasses import dataclass, field

from kvbus.gateway.answers import Bodies
from kvbus.gateway.caches import Caches
from kvbus.gateway.directory import Directory
from kvbus.gateway.engines import Engines
from kvbus.gateway.feed import Feed
from kvbus.gateway.lives import Lives
from kvbus.gateway.metering import RequestCounts
from kvbus.gateway.page_feed import PageFeed
from kvbus.gateway.settings import GatewaySettings
from kvbus.gateway.story_reader import Stories
from kvbus.gateway.transfers import Transfers
from kvbus.publisher import Publisher
from kvbus.topics import Topics
from kvbus.transport import Bus


@dataclass(frozen=True, slots=True)
class Parts:
    """What routes are made of. `bus` is the one connection of this gateway."""

    settings: GatewaySettings
    bus: Bus
    topics: Topics
    publisher: Publisher
    directory: Directory
    feed: Feed
    transfers: Transfers
    caches: Caches
    bodies: Bodies
    engines: Engines
    page: PageFeed
    stories: Stories
    requests: RequestCounts = field(default_factory=RequestCounts)
    lives: Lives = field(default_factory=Lives)
