package admin

import (
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// Membership decides who may join the cluster.
type Membership interface {
	// NewToken makes a join token.
	NewToken(o schema.JoinTokenOrder) (schema.JoinToken, error)
	// Tokens returns the join tokens, the latest first.
	Tokens() ([]schema.JoinTokenInfo, error)
	// RevokeToken makes a join token void. The error is ErrNoToken if there is none of this id.
	RevokeToken(id string) error
	// Revoke revokes the credentials of a node. The error is ErrNoNode if no node of that name has
	// valid credentials.
	Revoke(node string) error
}

// ErrNoAuthority means that no node can join this process.
var ErrNoAuthority = errors.New("no node can join: start `stagecoach up` with --nats-listen, or with --cluster-key if NATS is outside")

// ErrNoToken means that there is no join token of this id.
var ErrNoToken = errors.New("no join token has this id; it may have expired")

// members serves who may join:
//
//	GET /system/nodes/tokens
//	DELETE /system/nodes/tokens/ID
//	POST /system/nodes/tokens
//	POST /system/nodes/NAME/revoke
type members struct {
	Membership
	cacheAPI
}

func (m members) register(mux *http.ServeMux) {
	mux.HandleFunc("POST /system/nodes/tokens", m.token)
	mux.HandleFunc("GET /system/nodes/tokens", m.tokens)
	mux.HandleFunc("DELETE /system/nodes/tokens/{id}", m.revokeToken)
	mux.HandleFunc("POST /system/nodes/{name}/revoke", m.revoke)
}

// maxTTL is how long a join token may last that expires at all.
const maxTTL = 10 * 365 * 24 * time.Hour

func (m members) token(w http.ResponseWriter, r *http.Request) {
	o, err := readTokenOrder(http.MaxBytesReader(w, r.Body, maxCacheOrder))
	var t schema.JoinToken
	if err == nil {
		t, err = m.NewToken(o)
	}
	if err != nil {
		m.fail(w, r, err)
		return
	}
	w.Header().Set("Cache-Control", "no-store")
	answerJSON(w, t)
}

func (m members) tokens(w http.ResponseWriter, r *http.Request) {
	all, err := m.Tokens()
	if err != nil {
		m.fail(w, r, err)
		return
	}
	answerJSON(w, all)
}

func (m members) revokeToken(w http.ResponseWriter, r *http.Request) {
	if err := m.RevokeToken(r.PathValue("id")); err != nil {
		m.fail(w, r, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

func readTokenOrder(body interface{ Read([]byte) (int, error) }) (o schema.JoinTokenOrder, err error) {
	d := json.NewDecoder(body)
	d.DisallowUnknownFields()
	err = d.Decode(&o)
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return o, err
	case err != nil:
		return o, &pipeline.FieldError{Path: "body", Got: err.Error(), Want: "a JSON object with name, ttl (such as 1h) and uses, as they are needed"}
	case strings.ContainsAny(o.Name, " \t\n/"):
		return o, &pipeline.FieldError{Path: "name", Got: strconv.Quote(o.Name), Want: "a name without spaces and slashes, or none for any node"}
	case o.TTL < 0 || time.Duration(o.TTL) > maxTTL:
		return o, &pipeline.FieldError{Path: "ttl", Got: time.Duration(o.TTL).String(), Want: "a time such as 1h, at most " + maxTTL.String() + "; 0 for a token that does not expire"}
	case o.Uses < 0:
		return o, &pipeline.FieldError{Path: "uses", Got: strconv.Itoa(o.Uses), Want: "0 or more; 0 for any number"}
	}
	return o, nil
}

func (m members) revoke(w http.ResponseWriter, r *http.Request) {
	if err := m.Revoke(r.PathValue("name")); err != nil {
		m.fail(w, r, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}
