// Package telemetry sends OpenTelemetry spans of requests and of replicas' starts to a collector,
// over OTLP/HTTP.
//
// [Open] returns a [Tracer], or nil if no collector is configured. [Tracer.Begin] starts the span
// of a request and says which trace context its calls carry. [Span.End] gets the coordinator's
// measurements and creates the rest of the tree:
//
//	request (server)                      gateway: from the headers to the answer
//	└─ call NAME (client)                 one per attempt: replica, attempt, batch
//	   ├─ queue                           in the function's line; linked to the start it waited for
//	   ├─ inference                       on the replica
//	   └─ spans of the function itself    its traceparent names the call's span
//
//	replica start                         a separate trace: load, fork or spawn, load, place
//
// The spans of calls are created when the request has ended, so the cores of flow and dispatch know
// nothing of spans (docs/adr/0019). The standard variables apply: OTEL_EXPORTER_OTLP_*,
// OTEL_TRACES_SAMPLER, OTEL_RESOURCE_ATTRIBUTES, OTEL_SERVICE_NAME, OTEL_SDK_DISABLED. Requests
// never wait for the collector: spans that it does not take in time are dropped and counted.
package telemetry
