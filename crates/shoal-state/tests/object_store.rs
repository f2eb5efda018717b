//! Checkpoints in an object store, tried against a server here that speaks enough of S3's protocol and believes nobody:
//! every request's signature is worked out again from the credentials it knows.

mod common;
mod s3;

use std::borrow::Cow;
use std::path::Path;

use common::header;
use s3::{ACCESS_KEY, SECRET_KEY, Server};
use shoal_state::Error;
use shoal_state::checkpoint::{Checkpoint, Location, Slice, Store};

/// Elements of the one tensor: twelve mebibytes, so that a part is uploaded in pieces.
const ELEMENTS: usize = 3 << 20;

fn location(server: &Server, secret: &str) -> Location {
    let environment = [
        ("AWS_ACCESS_KEY_ID", ACCESS_KEY),
        ("AWS_SECRET_ACCESS_KEY", secret),
        ("AWS_REGION", "eu-north-1"),
        ("AWS_ENDPOINT", &server.endpoint()),
        ("AWS_ALLOW_HTTP", "true"),
        ("HOME", "nothing of an object store's concern"),
    ];
    let environment = environment.map(|(name, value)| (name.to_owned(), value.to_owned()));
    Location::parse("s3://bucket/runs/tiny", Path::new(""), environment).expect("a location")
}

fn open(server: &Server) -> Store {
    Store::open_at(&location(server, SECRET_KEY)).expect("opened")
}

/// What element `index` is in the save of a number.
fn value(index: usize, id: u64) -> f32 {
    (index % 65_521) as f32 + 1000.0 * id as f32
}

/// Writes a half of the tensor, or as much of it as `elements` says.
fn write_half(store: &Store, step: u64, id: u64, part: usize, elements: usize) -> Result<(), Error> {
    let range = (part - 1) * elements / 2..part * elements / 2;
    let values: Vec<f32> = range.clone().map(|index| value(index, id)).collect();
    let slices = [Slice { name: "w", role: "parameter", shape: &[elements], range }];
    let writer = store.begin_part(header(step), id, part, 2)?;
    writer.write(&slices, |_| Ok::<_, Error>(Cow::Borrowed(&values[..])))?;
    Ok(())
}

fn holds(checkpoint: &Checkpoint, id: u64, elements: usize) -> bool {
    let mut out = vec![0.0; elements];
    checkpoint.read("w", "parameter", 0..elements, &mut out).expect("read");
    out.iter().enumerate().all(|(index, found)| *found == value(index, id))
}

#[test]
fn parts_go_to_an_object_store_and_ranges_come_back() {
    let server = Server::start();
    let store = open(&server);
    assert!(store.latest().expect("an empty bucket is no error").is_none());
    std::thread::scope(|scope| {
        for part in [1, 2] {
            let server = &server;
            scope.spawn(move || {
                let own = Store::open_existing_at(&location(server, SECRET_KEY)).expect("opened");
                write_half(&own, 10, 1, part, 2 * ELEMENTS).expect("written");
            });
        }
    });
    assert_eq!(store.list().expect("listed"), [10]);
    let key = "runs/tiny/step-00000010-save-1-part-2-of-2/parameter-00001.safetensors";
    assert!(server.keys().contains(&key.to_owned()), "{:?}", server.keys());
    assert!(server.pieces() >= 4, "large objects go in pieces: {}", server.pieces());

    let (checkpoint, skipped) = store.latest().expect("sound").expect("complete");
    assert!(skipped.is_empty() && checkpoint.header() == &header(10));
    // Some elements across the parts' border: of 24 MiB the two blocks that hold them travel.
    let sent = server.bytes_sent();
    let mut out = vec![0.0; 1000];
    checkpoint.read("w", "parameter", ELEMENTS - 500..ELEMENTS + 500, &mut out).expect("read");
    assert!(out.iter().zip(ELEMENTS - 500..).all(|(found, index)| *found == value(index, 1)));
    let sent = server.bytes_sent() - sent;
    assert!(sent < 9 << 20, "{sent} bytes were sent");
    assert!(holds(&checkpoint, 1, 2 * ELEMENTS));

    server.damage(key);
    let damaged = store.load(10).expect("its manifests are whole");
    damaged.read("w", "parameter", 0..10, &mut out[..10]).expect("the damage is elsewhere");
    let end = 2 * ELEMENTS - 10..2 * ELEMENTS;
    assert!(matches!(damaged.read("w", "parameter", end, &mut out[..10]), Err(Error::Damaged { .. })));
    assert!(matches!(damaged.verify(), Err(Error::Damaged { .. })), "every byte is hashed");
}

#[test]
fn old_ones_are_removed_manifest_first() {
    let server = Server::start();
    let store = open(&server);
    for (step, id) in [(10, 1), (20, 2), (30, 3)] {
        [1, 2].iter().for_each(|part| write_half(&store, step, id, *part, 40).expect("written"));
    }
    write_half(&store, 40, 4, 2, 40).expect("written");
    assert_eq!(store.collect(2).expect("collected"), [10]);
    assert_eq!(store.list().expect("listed"), [20, 30]);
    assert!(holds(&store.load(30).expect("complete"), 3, 40));
    store.keep_only(|id| id == 3).expect("removed");
    assert_eq!(server.keys().len(), 4, "two parts, each a shard and a manifest: {:?}", server.keys());
    let deleted = server.deleted();
    let of_part = |part: &str| deleted.iter().filter(|key| key.contains(part)).cloned().collect::<Vec<_>>();
    let first = of_part("step-00000010-save-1-part-1");
    assert!(first.len() == 2 && first[0].ends_with("manifest.json"), "{first:?}");
}

/// The server answers nothing any more after some request: what was sent before is all there is.
#[test]
fn a_writer_cut_off_at_any_request_leaves_the_checkpoint_before() {
    let server = Server::start();
    let store = open(&server);
    [1, 2].iter().for_each(|part| write_half(&store, 10, 1, *part, 40).expect("written"));
    for requests in 0..60 {
        server.refuse_after(Some(requests));
        let written = [1, 2].map(|part| write_half(&store, 20, 2 + requests as u64, part, 40).is_ok());
        server.refuse_after(None);
        let (checkpoint, skipped) = store.latest().expect("sound").expect("there is one");
        assert!(skipped.is_empty(), "{skipped:?}");
        if written == [true, true] {
            assert!(holds(&checkpoint, 2 + requests as u64, 40));
            assert!(requests > 6, "a save is more requests than {requests}");
            return;
        }
        assert!(checkpoint.header().step == 10 && holds(&checkpoint, 1, 40), "{requests} requests");
    }
    panic!("the save never ends");
}

#[test]
fn who_has_not_the_secret_is_refused_and_it_is_never_shown() {
    let server = Server::start();
    let wrong = "a-wrong-secret-that-nobody-should-read";
    let location = location(&server, wrong);
    assert_eq!(format!("{location:?}"), "s3://bucket/runs/tiny");
    let error = Store::open_at(&location).expect_err("refused");
    let told = format!("{error} {error:?} {}", error.hint().expect("a hint"));
    assert!(!told.contains(wrong) && !told.contains(SECRET_KEY), "{told}");
    assert!(told.contains("s3://bucket/runs/tiny") && told.contains("credentials"), "{told}");
    assert!(server.refused() > 0, "it was the server that refused");

    let parse = |url: &str| Location::parse(url, Path::new("/base"), []);
    for url in
        ["s3://key:sesame@bucket/runs", "s3://bucket/runs?token=sesame", "ftp://sesame/runs", "file://runs"]
    {
        let error = parse(url).expect_err(url);
        assert!(!format!("{error} {error:?}").contains("sesame"), "{error:?}");
    }
    assert_eq!(parse("runs/tiny").expect("a path"), Location::Folder("/base/runs/tiny".into()));
    assert_eq!(parse("file:///runs/tiny").expect("a path"), Location::Folder("/runs/tiny".into()));
}
