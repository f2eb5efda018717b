//! The controller as a process: its folder, its identity, its thread and its sockets.

use std::convert::Infallible;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use axum::routing::Router;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use shoal_control::Settings;
use shoal_net::identity::Authority;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::runtime::{Handle, Runtime};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tower_service::Service;

use crate::access::{ACCESS_FILE, Access};
use crate::api::{Api, Peer, TokenAnswer, router};
use crate::driver::{Ask, Desk, Driver};
use crate::error::{Error, Result};
use crate::folder::Folder;
use crate::planning::Planner;
use crate::secret::Secret;
use crate::socket::Socket;
use crate::tls::{self, CONTROLLER};
use crate::token::Roll;

const AUTHORITY_FILE: &str = "authority.pem";
const AUTHORITY_KEY_FILE: &str = "authority-key.pem";
const BEARER_FILE: &str = "api-token";
const BEARER_BYTES: usize = 32;

/// Connections at a time, and how long each may take to say what it wants.
const CONNECTIONS_MAX: usize = 4_096;
const PATIENCE: Duration = Duration::from_secs(10);
const HEAD_BYTES_MAX: usize = 1 << 16;

#[derive(Clone, Debug)]
pub struct Options {
    pub listen: SocketAddr,
    pub folder: PathBuf,
    /// Names under which it is reached, beside addresses.
    pub hosts: Vec<String>,
    pub settings: Settings,
}

/// A controller that runs. It ends when it is stopped or let go of.
pub struct Controller {
    access: Access,
    api: Arc<Api>,
    desk: Desk,
    driver: Option<JoinHandle<Result>>,
    runtimes: Vec<Runtime>,
}

impl Controller {
    /// Goes on from what the folder has, or begins a fleet.
    pub fn start(
        options: Options,
        planner: Arc<dyn Planner>,
        complaints: crate::Complaints,
    ) -> Result<Controller> {
        let settings = options.settings.check()?;
        let folder = Arc::new(Folder::open(&options.folder)?);
        let authority = authority(&folder)?;
        let bearer = bearer(&folder)?;
        let failed = |source| Error::Listen { address: options.listen, source };
        let listener = TcpListener::bind(options.listen).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let url = url(address, &options.hosts);

        let reached = ["localhost".into(), "127.0.0.1".into(), "::1".into(), address.ip().to_string()];
        let mut others: Vec<String> = reached.into_iter().chain(options.hosts.iter().cloned()).collect();
        others.sort();
        others.dedup();
        let identity = authority.issue_with(CONTROLLER, &others)?;
        let tls = TlsAcceptor::from(tls::server(&identity)?);
        let access =
            Access { url: url.clone(), token: bearer.clone(), authority: authority.certificate_pem().into() };
        folder.write(ACCESS_FILE, &access.to_text())?;

        let (driver, desk, history, books) =
            Driver::open(settings, folder.clone(), planner.clone(), complaints.clone())?;
        let names = options.hosts.into_iter().chain([CONTROLLER.to_owned()]).collect();
        let api = Arc::new(Api {
            settings,
            desk: desk.clone(),
            history,
            books,
            planner,
            authority_hash: tls::authority_hash(authority.certificate_pem())?,
            authority,
            bearer,
            roll: Mutex::new(Roll::read(&folder)?),
            folder,
            names,
            url,
            links: AtomicU64::new(0),
            complaints,
        });
        // Threads of their own for workers: whoever asks would otherwise wait behind all that a thousand of them say at once.
        let (asking, workers) = (runtime().map_err(failed)?, runtime().map_err(failed)?);
        let listener = {
            let _inside = asking.enter();
            tokio::net::TcpListener::from_std(listener).map_err(failed)?
        };
        asking.spawn(listen(listener, tls, router(api.clone()), workers.handle().clone()));
        let driver = Some(std::thread::spawn(move || driver.run()));
        Ok(Controller { access, api, desk, driver, runtimes: vec![asking, workers] })
    }

    /// What commands need to talk to it.
    pub fn access(&self) -> &Access {
        &self.access
    }

    /// A token for one worker, and the command to paste there.
    pub fn token(&self, minutes: u64) -> Result<TokenAnswer> {
        Ok(self.api.token(minutes, None)?)
    }

    /// What answers its requests, for one who has other connections than sockets.
    pub fn router(&self) -> Router {
        router(self.api.clone())
    }

    /// Something that stops it from elsewhere.
    pub fn stopper(&self) -> impl Fn() + Send + 'static {
        let desk = self.desk.clone();
        move || desk.tell(Ask::Stop)
    }

    /// Until it is stopped, or its disk fails.
    pub fn wait(mut self) -> Result {
        let driver = self.driver.take().expect("it was started");
        driver.join().unwrap_or_else(|_| Err(Error::Stopped("its thread failed".into())))
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        self.desk.tell(Ask::Stop);
        if let Some(driver) = self.driver.take() {
            let _ = driver.join();
        }
        for runtime in self.runtimes.drain(..) {
            runtime.shutdown_timeout(Duration::from_secs(1));
        }
    }
}

fn runtime() -> std::io::Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()
}

fn url(address: SocketAddr, hosts: &[String]) -> String {
    match hosts.first() {
        Some(host) => format!("https://{host}:{}", address.port()),
        None => format!("https://{address}"),
    }
}

fn authority(folder: &Folder) -> Result<Authority> {
    if let Some(key) = folder.read(AUTHORITY_KEY_FILE)? {
        let missing =
            || Error::Content { path: folder.path().join(AUTHORITY_FILE), cause: "it is missing".into() };
        let certificate = folder.read(AUTHORITY_FILE)?.ok_or_else(missing)?;
        return Ok(Authority::from_pem(&certificate, &key)?);
    }
    let authority = Authority::new()?;
    // The key last: without it there is no authority yet.
    folder.write(AUTHORITY_FILE, authority.certificate_pem())?;
    folder.write(AUTHORITY_KEY_FILE, &authority.key_pem())?;
    Ok(authority)
}

fn bearer(folder: &Folder) -> Result<Secret> {
    if let Some(text) = folder.read(BEARER_FILE)? {
        return Ok(Secret::from_text(&text));
    }
    let bearer = Secret::random(BEARER_BYTES)?;
    folder.write(BEARER_FILE, bearer.expose())?;
    Ok(bearer)
}

/// Where a controller's folder is if nobody says otherwise.
pub fn default_folder(state: &Path) -> PathBuf {
    state.join("controller")
}

async fn listen(listener: tokio::net::TcpListener, tls: TlsAcceptor, router: Router, workers: Handle) {
    let connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(permit) = connections.clone().acquire_owned().await else { return };
        let Ok((stream, _)) = listener.accept().await else {
            // Out of descriptors, most likely: others have to close first.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let (tls, router, workers) = (tls.clone(), router.clone(), workers.clone());
        tokio::spawn(async move {
            serve(stream, tls, router, &workers).await;
            drop(permit);
        });
    }
}

/// One connection. What goes wrong here is the other end's affair. One that shows a certificate is a worker's, and served
/// among those.
async fn serve(stream: TcpStream, tls: TlsAcceptor, router: Router, workers: &Handle) {
    let _ = stream.set_nodelay(true);
    let accepted = timeout(PATIENCE, tls.accept(Socket::new(stream))).await;
    let Ok(Ok(mut stream)) = accepted else { return };
    let shown = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
    let Some(certificate) = shown.map(|certificate| certificate.clone().into_owned()) else {
        return serve_stream(stream, Peer(None), router).await;
    };
    let served = workers.spawn(async move {
        if stream.get_mut().0.move_here().is_ok() {
            serve_stream(stream, Peer(Some(certificate)), router).await;
        }
    });
    let _ = served.await;
}

/// HTTP on a stream whose other end has shown what it has. Anything can be fed to it.
pub async fn serve_stream(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    peer: Peer,
    router: Router,
) {
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(peer.clone());
        let mut router = router.clone();
        async move {
            let response: std::result::Result<_, Infallible> = router.call(request.map(Body::new)).await;
            response
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(PATIENCE)
        .max_buf_size(HEAD_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let _ = connection.await;
}
