// Package outside writes what a NATS cluster outside and its control planes need to trust each
// other: the cluster key, and for each nats-server a folder with its configuration and its
// certificates.
package outside

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity/authority"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// KeyFile is the name of the cluster key in the folder of Init.
const KeyFile = "cluster.key"

// Init writes a cluster key into a folder, and a folder below it for each server. If there is a
// cluster key, Init keeps it, and replaces the files of the servers.
func Init(dir string, servers []queue.OutsideServer, now time.Time) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	file := filepath.Join(dir, KeyFile)
	key, err := authority.ReadClusterKey(file)
	if errors.Is(err, fs.ErrNotExist) {
		key = authority.NewClusterKey()
		err = key.Write(file)
	}
	if err != nil {
		return err
	}
	for _, s := range servers {
		if err := write(filepath.Join(dir, s.Name), key, s, servers, now); err != nil {
			return err
		}
	}
	return nil
}

// InitServer writes the files of one server into a folder, with the cluster key in a file. host is
// that of the server in the list of all servers.
func InitServer(dir, keyFile, host string, servers []queue.OutsideServer, now time.Time) error {
	key, err := authority.ReadClusterKey(keyFile)
	if err != nil {
		return err
	}
	for _, s := range servers {
		if s.Host == host {
			return write(dir, key, s, servers, now)
		}
	}
	return fmt.Errorf("server %q is not one of the servers", host)
}

// write writes the files of a server.
func write(dir string, key authority.ClusterKey, s queue.OutsideServer, all []queue.OutsideServer, now time.Time) error {
	keys, err := queue.DeriveKeys(key.Derive)
	if err != nil {
		return err
	}
	config, err1 := keys.OutsideConfig(s, all)
	client, err2 := key.ServerCertificate(s.Name, s.Host, now)
	route, routeCA, err3 := key.RouteCertificate(s.Name, s.Host, now)
	if err := errors.Join(err1, err2, err3); err != nil {
		return err
	}
	for name, b := range map[string][]byte{
		queue.OutsideConfig: config, queue.OutsideCert: client.Certificate, queue.OutsideKey: client.Key,
		queue.OutsideRouteCert: route.Certificate, queue.OutsideRouteKey: route.Key, queue.OutsideRouteCA: routeCA,
	} {
		if err := identity.WriteSecret(filepath.Join(dir, name), b); err != nil {
			return err
		}
	}
	return nil
}
