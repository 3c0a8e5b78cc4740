package main

import (
	"cmp"
	"flag"

	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// apiFlags are of all commands that talk to a running stagecoach.
type apiFlags struct {
	gateway   string
	namespace string
}

func newAPIFlags(fs *flag.FlagSet) *apiFlags {
	f := &apiFlags{}
	fs.StringVar(&f.gateway, "gateway", "", "URL of a running stagecoach; default: $OPENFAAS_URL, then "+client.DefaultGateway)
	fs.StringVar(&f.namespace, "namespace", "", "namespace, in place of the default one")
	fs.StringVar(&f.namespace, "n", "", "short for --namespace")
	return f
}

// open returns a client for the gateway: the flag's, that of the stack file unless it is the default one, the environment's,
// or the default.
func (f *apiFlags) open(inStack string) (*client.Client, error) {
	if inStack == client.DefaultGateway {
		inStack = ""
	}
	return client.Dial(cmp.Or(f.gateway, inStack))
}

// gatewayFlag is the gateway of commands that take no namespace.
func gatewayFlag(fs *flag.FlagSet) *string {
	return fs.String("gateway", "", "URL of a running stagecoach; default: $OPENFAAS_URL, then "+client.DefaultGateway)
}

// query is for the paths that take a namespace.
func (f *apiFlags) query() string {
	return client.Query(f.namespace)
}
