// Package watchdog turns the program of a function that does not speak the stage protocol into a
// replica that does. It is the command `stagecoach watchdog`, which a KeysManager starts instead of
// the image's program.
//
// The environment variables are those of of-watchdog. fprocess is the command; without it, the
// image's own entrypoint runs, in mode http. The modes are:
//
//   - http: the program listens on the port that the variable port (PORT, http_port) names, or
//     at the address in upstream_url. It answers HTTP requests for as long as the replica lives.
//   - streaming and serializing: the program runs once per request. It gets the body on stdin, and
//     the request line and the headers as variables Http_*. Its stdout is the answer.
//   - static: there is no program. This process serves the files of a folder of the image.
//
// A replica is ready when its program is ready. The annotation com.openfaas.ready.http.path or the
// variable ready_path names a path that is probed; 2xx means ready. Without either, /_/ready and
// then /_/health are probed:
//   - 2xx means ready
//   - 429 and 503 mean not ready yet
//   - any other answer means that the program does not know the path; if it knows neither, it is
//     ready
//
// After that, the path of com.openfaas.health.http.path is probed, if the function has that
// annotation. Three consecutive failures end the replica.
//
// A call that is an HTTP request has the address of a rendezvous (task.HeaderDirect). The replica
// connects to the gateway there, and the HTTP exchange runs on that connection, beside the queue,
// with all features of HTTP. If the request is small enough to travel with the call, its answer is
// the call's result, unless the answer streams or is large. The call ends with the exchange, so
// slots, deadlines, cancellation and drains work as for any stage. A call that is not an HTTP
// request carries its input. A canceled call keeps its slot until the program has ended it.
package watchdog
