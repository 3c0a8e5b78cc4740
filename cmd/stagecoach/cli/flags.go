// Package cli has the commands that call a running gateway, and the commands that create functions
// and their images. Each command takes the arguments after its name. It writes its result to out
// and everything else to standard error.
package cli

import (
	"cmp"
	"flag"

	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// apiFlags are the flags of commands that take a namespace.
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

// open returns a client for a gateway. It takes the gateway of the flag, else the one of the stack
// file (inStack), else the one of the environment, else the default. The default gateway in a stack
// file counts as none.
func (f *apiFlags) open(inStack string) (*client.Client, error) {
	if inStack == client.DefaultGateway {
		inStack = ""
	}
	return client.Dial(cmp.Or(f.gateway, inStack))
}

// gatewayFlag adds the flag of commands that take no namespace.
func gatewayFlag(fs *flag.FlagSet) *string {
	return fs.String("gateway", "", "URL of a running stagecoach; default: $OPENFAAS_URL, then "+client.DefaultGateway)
}

// query returns the query of paths that take a namespace.
func (f *apiFlags) query() string {
	return client.Query(f.namespace)
}
