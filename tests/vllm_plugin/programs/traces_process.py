"""Serve prompts one after another by an engine, and keep the spans that a collector receives.

traces_process.py JOB.json RESULT.json
"""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

MOST_SECONDS = 120
"""Seconds to wait for the spans after the last answer. They are sent ten times a second."""


class Collector(ThreadingHTTPServer):
    """A collector of OpenTelemetry's protocol over HTTP, with the spans that it received."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Receiver)
        self.spans = []
        Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1/traces"

    def of_name(self, name):
        return [each for each in self.spans if each["name"] == name]


class Receiver(BaseHTTPRequestHandler):
    """Receives a message of spans."""

    def do_POST(self):
        import gzip

        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
            ExportTraceServiceResponse,
        )

        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += map(described, scope.spans)
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.end_headers()
        self.wfile.write(ExportTraceServiceResponse().SerializeToString())

    def log_message(self, *_):
        pass


def described(span):
    return {
        "name": span.name,
        "trace": span.trace_id.hex(),
        "parent": span.parent_span_id.hex(),
        "start_ns": span.start_time_unix_nano,
        "end_ns": span.end_time_unix_nano,
        "attributes": {
            each.key: getattr(each.value, each.value.WhichOneof("value"))
            for each in span.attributes
        },
    }


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM, SamplingParams

    collector = Collector()
    options = {"disable_log_stats": False, "otlp_traces_endpoint": collector.url}
    engine = LLM(**job["options"] | options).llm_engine
    sampling = SamplingParams(
        temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False
    )
    answers = []
    for number, (prompt, headers) in enumerate(zip(job["prompts"], job["headers"], strict=True)):
        engine.add_request(
            f"request {number}", {"prompt_token_ids": prompt}, sampling, trace_headers=headers
        )
        while engine.has_unfinished_requests():
            answers += [each for each in engine.step() if each.finished]
    end = time.monotonic() + MOST_SECONDS
    names = ("jenga.admission", "llm_request")
    while time.monotonic() < end and any(
        len(collector.of_name(name)) < len(answers) for name in names
    ):
        time.sleep(0.05)
    result = {
        "answers": [
            {
                "prompt_tokens": len(each.prompt_token_ids),
                "cached_tokens": each.num_cached_tokens,
                "tokens": list(each.outputs[0].token_ids),
            }
            for each in answers
        ],
        "spans": list(collector.spans),
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
