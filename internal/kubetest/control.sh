# The control plane, on the machine that also has the network's switch. Its environment: BIN, RUN,
# DIR, IP, SERVER, NODES.
for i in $(seq "$NODES"); do ip route add "10.244.$i.0/24" via "10.98.0.$((i + 1))"; done
echo 1 >/proc/sys/net/ipv4/ip_forward
"$BIN/etcd" --name test --data-dir etcd --unsafe-no-fsync \
  --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
  --listen-peer-urls http://127.0.0.1:2380 --initial-advertise-peer-urls http://127.0.0.1:2380 \
  --initial-cluster test=http://127.0.0.1:2380 >etcd.log 2>&1 &
"$BIN/kube-apiserver" --etcd-servers=http://127.0.0.1:2379 --cert-dir=certs \
  --bind-address="$IP" --advertise-address="$IP" --secure-port="${SERVER##*:}" \
  --kubelet-preferred-address-types=InternalIP --allow-privileged=true \
  --service-account-issuer=https://kubernetes.default.svc \
  --service-account-key-file=accounts.pem --service-account-signing-key-file=accounts.pem \
  --service-cluster-ip-range="$SERVICES" --authorization-mode=Node,RBAC \
  --token-auth-file=tokens.csv >apiserver.log 2>&1 &
# The others would end if the API server did not answer.
until "$BIN/kubectl" get --raw /readyz >/dev/null 2>&1; do sleep 0.05; done
"$BIN/kube-controller-manager" --kubeconfig="$KUBECONFIG" --secure-port=0 --leader-elect=false \
  --service-account-private-key-file=accounts.pem --root-ca-file=certs/apiserver.crt \
  --use-service-account-credentials=false --kube-api-qps=200 --kube-api-burst=400 \
  --node-monitor-grace-period=20s >controllers.log 2>&1 &
"$BIN/kube-scheduler" --kubeconfig="$KUBECONFIG" --secure-port=0 --leader-elect=false \
  --kube-api-qps=200 --kube-api-burst=400 >scheduler.log 2>&1 &
touch ready
wait
