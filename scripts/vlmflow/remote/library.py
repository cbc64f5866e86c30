"""All that this package uses of the rest of vlmflow. Every other module of it takes these names from here.

To install the package without vlmflow, give it another module of this name. The doctors alone use the configuration.
"""

from vlmflow import CHECKOUT, PACKAGE, SCRIPTS
from vlmflow.config.model import Config, check_config
from vlmflow.config.source import HubSource, parse_source
from vlmflow.config.strategies import strategy_of
from vlmflow.config.yaml_file import read_layers
from vlmflow.core.child_programs import ATTEMPT, NODE_0, OTHER_NODE, PORT, PORT_OF
from vlmflow.core.errors import (
    FAILURE,
    NOT_AGAIN,
    SAVED,
    SHOWN_BYTES,
    VERDICT,
    PassingError,
    VlmflowError,
    counted,
    end_of,
    plain,
    printable,
)
from vlmflow.core.files import (
    BUFFER,
    FOLDER_MARK,
    lies_within,
    remove,
    require_free_disk,
    sha256_of,
    sync,
    unfinished,
    whole_file,
    whole_folder,
)
from vlmflow.core.patience import AGAIN, CONNECT_TIMEOUT, PASSING_STATUS, READ_TIMEOUT, PassingFault, patiently
from vlmflow.core.processes import tell_stages
from vlmflow.core.progress import LOG_INTERVAL, Progress, clock
