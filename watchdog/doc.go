// Package watchdog runs the program of a function that does not speak the stage protocol, as a replica that does: the
// command `stagecoach watchdog`, which a KeysManager starts in place of the image's program.
//
// The environment is of-watchdog's. In mode http the program listens on the port that the environment port (PORT, http_port)
// names, or where upstream_url says, and answers HTTP requests for as long as the replica lives. In the modes streaming and
// serializing there is one process a request: the body on stdin, the request line and headers as Http_*, the answer from
// stdout. fprocess is the command; without it an image's own entrypoint runs, in mode http. In mode static there is no
// program: this process serves the files of a folder of the image.
//
// A replica is ready when its program is: when the path of the annotation com.openfaas.ready.http.path or of the environment
// ready_path answers 2xx. Without either /_/ready is asked, then /_/health: 2xx is ready, 429 and 503 are not yet, and to a
// program that answers anything else there is nothing to ask: it is ready once it accepts connections.
//
// After that com.openfaas.health.http.path is asked, if the function has it; three bad answers in a row end the replica.
//
// A call that is a request of its own brings the address of a rendezvous (task.HeaderDirect): the replica dials it, and the
// HTTP exchange runs on that connection, past the queue, with all that HTTP has. If the call brings the request too, its
// answer is the call's result, unless the answer streams or is large. The call ends with the exchange, so that slots,
// deadlines, cancellation and drains are those of any stage. Other calls bring their input along. A canceled call keeps its
// slot until the program has ended it.
package watchdog
