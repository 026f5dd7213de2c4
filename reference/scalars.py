"""What TensorBoard reads of a run: every scalar with its steps, as JSON. scalars.py RUN"""

import json
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

everything = {"scalars": 0}
events = EventAccumulator(f"{sys.argv[1]}/tensorboard", size_guidance=everything)
events.Reload()
read = {tag: [[event.step, event.value] for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
# JSON has no word for what is not finite; Python writes one all the same.
print(json.dumps({tag: [[step, str(value)] for step, value in values] for tag, values in read.items()}))
