// Package gateway is the HTTP side of requests. It turns HTTP requests to /function/NAME into
// requests that a coordinator runs through a pipeline, and results into HTTP responses.
//
// [Gateway.Handler] stands before the router: it handles the paths that begin with its own prefixes
// and passes all other requests on. POST /async-function/NAME answers 202 once the [Journal] has
// the request on disk. The journal's consumer calls [Gateway.Work] to run each [Entry], and
// [Callbacks.Deliver] to send the result.
//
// Headers follow OpenFaaS: X-Call-Id, X-Start-Time, X-Duration-Seconds, X-Timeout, X-Callback-Url,
// and X-OpenFaaS-Internal on the platform's own errors. Server-Timing shows how long each stage
// waited and worked. A function gets the client's headers, and the request line as Http-Method,
// Http-Path and Http-Query.
package gateway
