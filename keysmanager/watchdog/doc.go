// Package watchdog runs the program of a function that does not speak the stage protocol, as a
// replica that does. It is the command `stagecoach watchdog`, which a KeysManager starts instead of
// the image's program.
//
// The environment is of-watchdog's. fprocess is the command. Without it, the image's own entrypoint
// runs, in mode http. The modes are:
//
//   - http: the program listens on the port that the variable port (PORT, http_port) names, or
//     where upstream_url says. It answers HTTP requests for as long as the replica lives.
//   - streaming and serializing: there is one process per request. It gets the body on stdin, and
//     the request line and the headers as variables Http_*. Its stdout is the answer.
//   - static: there is no program. This process serves the files of a folder of the image.
//
// A replica is ready when its program is. The program is ready when the path of the annotation
// com.openfaas.ready.http.path, or of the variable ready_path, answers 2xx. Without either,
// /_/ready and then /_/health are probed: 2xx means ready, and 429 and 503 mean not yet. After any
// other answer there is nothing to probe, so the program is ready once it accepts connections.
//
// After that, com.openfaas.health.http.path is probed, if the function has it. Three consecutive
// failures end the replica.
//
// A call that is an HTTP request has the address of a rendezvous (task.HeaderDirect). The replica
// dials it, and the HTTP exchange runs on that connection, beside the queue, with all features of
// HTTP. If the call also carries the request, its answer is the call's result, unless the answer
// streams or is large. The call ends with the exchange, so slots, deadlines, cancellation and
// drains work as for any stage. Other calls carry their input. A canceled call keeps its slot until
// the program has ended it.
package watchdog
