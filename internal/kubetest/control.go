package kubetest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
)

// token is the administrator's. The network has no way out.
const token = "administrator"

// startControl starts the control plane and waits until the API server answers.
func (c *Cluster) startControl(nodes int) {
	c.t.Helper()
	dir := filepath.Join(c.dir, "control")
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		c.t.Fatal(err)
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		c.t.Fatal(err)
	}
	write(c.t, filepath.Join(dir, "accounts.pem"), string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})))
	write(c.t, filepath.Join(dir, "tokens.csv"), token+",admin,1,system:masters\n")
	// The API server makes its certificate.
	write(c.t, c.Kubeconfig, fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: test, cluster: {server: %q, certificate-authority: %q}}]
users: [{name: admin, user: {token: %s}}]
contexts: [{name: test, context: {cluster: test, user: admin}}]
current-context: test
`, c.Server, filepath.Join(dir, "certs", "apiserver.crt"), token))
	c.control = c.run(c.net.Clients, dir, controlScript, "KUBECONFIG="+c.Kubeconfig, fmt.Sprintf("NODES=%d", nodes), "SERVICES="+serviceIP)
	c.Await("the API server", func() (string, bool) {
		_, err := os.Stat(filepath.Join(dir, "ready"))
		return fmt.Sprint(err), err == nil
	})
}
