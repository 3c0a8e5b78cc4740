// Package telemetry sends OpenTelemetry spans of requests and of replicas' starts to a collector, over OTLP/HTTP.
//
// It is off unless somebody names a collector. [Open] then gives a [Tracer]: [Tracer.Begin] starts the span of a request and
// says which trace context its calls carry; [Span.End] gets all that the coordinator measured and makes the rest of the tree:
//
//	request (server)                      gateway: from the headers to the answer
//	└─ call NAME (client)                 one an attempt: replica, attempt, batch
//	   ├─ queue                           in the function's line; linked to the start that it waited for
//	   ├─ inference                       on the replica
//	   └─ what the function itself sends  its traceparent names the call's span
//
//	replica start                         a trace of its own: load, fork or spawn, load, place
//
// The cores of flow and dispatch know nothing of spans: docs/adr/0019 says why they are built when a request has ended. The
// standard's environment holds: OTEL_EXPORTER_OTLP_*, OTEL_TRACES_SAMPLER, OTEL_RESOURCE_ATTRIBUTES, OTEL_SERVICE_NAME,
// OTEL_SDK_DISABLED. What the collector does not take in time is dropped and counted; nobody waits for it.
package telemetry
