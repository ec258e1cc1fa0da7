"""The service where no harness can be imported: models by name, prompts as text, results as those
of `Engine.run`.
"""

import os
import subprocess
import sys

from tests.helpers.paths import ROOT

HARNESSES = ("helm", "lm_eval", "inspect_ai", "openai")
# What any harness does: encode a prompt once, key the request, ask from many threads, end at the
# end of the process.
PROGRAM = """
import atexit, sys
from concurrent.futures import ThreadPoolExecutor

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {harnesses!r}:
            raise ImportError(name + " is not here")

sys.meta_path.insert(0, Refuse())
from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.service import process
from flexgen_helm.service.loaders import EngineLoader
from flexgen_helm.service.models import ModelArguments, ModelReader
from flexgen_helm.service.service import KeyedRequest, Service, request_key

service, reader = Service(EngineLoader()), ModelReader("this harness")
atexit.register(process.close_at_exit, service.close)
process.interrupt_on_signals(service.interrupt)
model = ModelArguments("tiny", {path!r}, options={{"device": "cpu"}})
service.preload(model)
prompts = [f"the quick {{word}}" for word in ("fox", "dog", "fox", "brown")]
requests = [GenerationRequest(prompt_token_ids=reader.encoder(model).encode(p), max_tokens=3) for p in prompts]
keyed = [KeyedRequest(request, request_key(request)) for request in requests]
with service.submit(model, keyed) as block, ThreadPoolExecutor(4) as pool:
    responses = list(pool.map(lambda request: service.respond(model, request), keyed))
    assert len(block.responses()) == 3  # equal requests are one
with Engine.from_pretrained({path!r}, device="cpu") as engine:
    expected = engine.run(requests)
assert [r.result.completions[0].token_ids for r in responses] == [e.completions[0].token_ids for e in expected]
assert service.respond(model, keyed[0]).result == responses[0].result
assert service.loaded(model).fingerprint == engine.fingerprint
assert reader.facts(model).max_positions > 0
print(sorted({{name.split(".")[0] for name in sys.modules}} & set({harnesses!r})))
"""


def test_a_harness_of_ones_own_gets_what_the_engine_computes(tiny, tmp_path, monkeypatch):
    code = PROGRAM.format(harnesses=HARNESSES, path=str(tiny("llama").path))
    environment = {**os.environ, "FLEXGEN_HELM_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
    assert len(list((tmp_path / "journal").iterdir())) == 1
