// Package gateway is the data path: it turns HTTP requests to /function/NAME into requests that a coordinator walks
// through a pipeline, and results into HTTP responses.
//
// [Gateway.Handler] stands in front of the router: the two prefixes are cut by hand, what is not theirs goes on to the next
// handler. POST /async-function/NAME answers 202 once its [Journal] has the request on disk; whoever empties the journal
// gives each [Entry] to [Gateway.Work], which runs it and calls back.
//
// Headers follow OpenFaaS: X-Call-Id, X-Start-Time, X-Duration-Seconds, X-Timeout, X-Callback-Url, X-OpenFaaS-Internal on
// the platform's own errors. Server-Timing tells how long each stage waited and worked. A function gets the client's
// headers, and the request line as Http-Method, Http-Path and Http-Query.
package gateway
