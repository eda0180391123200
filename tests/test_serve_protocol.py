"""What clients send becomes what a policy sees, in every dialect and encoding; what they must not send is refused."""

import pickle
import random
from typing import Any

import numpy as np
import pytest

from wamlab.errors import InputError

msgpack = pytest.importorskip("msgpack", reason="pip install 'wamlab[serve]'")
pytest.importorskip("websockets", reason="pip install 'wamlab[serve]'")

from wamlab.serve.arrays import decode, encode  # noqa: E402
from wamlab.serve.protocol import Contract, read_request, write_reply  # noqa: E402
from wamlab.serve.sessions import Memory, Sessions  # noqa: E402

DROID = Contract(("exterior_image_1_left", "exterior_image_2_left", "wrist_image_left"), 8, 8, (180, 320))
ONE = Contract(("exterior_image_1_left", "wrist_image_left"), 8, 8)
ACTIONS = np.arange(16, dtype=np.float32).reshape(2, 8)


def frame(value: int) -> np.ndarray:
    return np.full((6, 10, 3), value, np.uint8)


def droid_request(**more: Any) -> dict[str, Any]:
    return {
        "observation/wrist_image_left": frame(3),
        "observation/joint_position": np.arange(7.0),
        "observation/gripper_position": np.array([0.5]),
        "prompt": "lift the cup",
        **more,
    }


def roboarena_request(**more: Any) -> dict[str, Any]:
    exterior = {f"observation/exterior_image_{i}_left": frame(i + 1) for i in (0, 1)}
    return droid_request(**exterior, endpoint="infer", session_id="a", **more)


@pytest.mark.parametrize("encoding", ["openpi", "msgpack-numpy"])
def test_both_encodings_are_told_apart_and_answered_in_kind(encoding: Any) -> None:
    value = {"x": np.arange(6, dtype=np.int16).reshape(2, 3), "y": np.float32(2.5), "z": np.ones(()), "n": [1, "a"]}
    found, told = decode(encode(value, encoding))
    assert told == encoding
    np.testing.assert_array_equal(found["x"], value["x"])
    assert found["x"].dtype == np.int16 and not found["x"].flags.writeable
    assert found["y"] == np.float32(2.5) and found["y"].dtype == np.float32
    assert found["z"].shape == () and found["n"] == [1, "a"]
    request = read_request(encode(roboarena_request(), encoding), DROID)
    assert decode(write_reply(request, ACTIONS, {}))[1] == encoding


def test_encodings_are_those_of_the_published_packages() -> None:
    theirs = pytest.importorskip("msgpack_numpy", reason="pip install msgpack-numpy")
    value = {"x": np.arange(6.0).reshape(2, 3), "s": np.float64(2)}
    np.testing.assert_array_equal(theirs.unpackb(encode(value, "msgpack-numpy"))["x"], value["x"])
    found, told = decode(theirs.packb(value))
    np.testing.assert_array_equal(found["x"], value["x"])
    assert told == "msgpack-numpy" and found["s"] == 2
    openpi = pytest.importorskip("openpi_client.msgpack_numpy", reason="pip install --no-deps openpi-client")
    np.testing.assert_array_equal(openpi.unpackb(encode(value, "openpi"))["x"], value["x"])
    np.testing.assert_array_equal(decode(openpi.packb(value))[0]["x"], value["x"])


def test_openpi_sends_an_observation_and_gets_actions_with_timing() -> None:
    sent = droid_request(**{"observation/exterior_image_1_left": frame(1)})
    request = read_request(encode(sent, "openpi"), ONE)
    assert (request.dialect, request.session_id, request.instruction) == ("openpi", None, "lift the cup")
    assert [view[0, 0, 0] for view in request.frames.values()] == [1, 3]
    assert request.state.tolist() == [0, 1, 2, 3, 4, 5, 6, 0.5]
    reply, _ = decode(write_reply(request, ACTIONS, {"infer_ms": 3.0}))
    np.testing.assert_array_equal(reply["actions"], ACTIONS)
    assert reply["server_timing"] == {"infer_ms": 3.0}


def test_roboarena_counts_exterior_cameras_from_zero() -> None:
    request = read_request(encode(roboarena_request(), "openpi"), DROID)
    assert (request.dialect, request.session_id) == ("roboarena", "a")
    assert [view[0, 0, 0] for view in request.frames.values()] == [1, 2, 3]
    assert decode(write_reply(request, ACTIONS, {}))[0].keys() == {"actions"}


def test_dreamzero_sends_stacks_and_may_be_answered_by_a_bare_array() -> None:
    sent = roboarena_request()
    for key in [key for key in sent if "image" in key]:
        sent[key] = np.stack([frame(7), frame(8)])
    request = read_request(encode(sent, "openpi"), DROID)
    assert request.frames["wrist_image_left"][0, 0, 0] == 8 and len(request.film["wrist_image_left"]) == 2
    bare, _ = decode(write_reply(request, ACTIONS, {}, reply="array"))
    np.testing.assert_array_equal(bare, ACTIONS)
    assert bare.dtype == np.float32


def test_molmospaces_sends_raw_observations_and_gets_one_action() -> None:
    raw = {
        "exo_camera_1": frame(1),
        "wrist_camera": frame(3),
        "qpos": {"arm": np.arange(7.0), "gripper": np.array([0.4, 0.4])},
        "task": "open the drawer",
    }
    request = read_request(encode(raw, "msgpack-numpy"), DROID)
    assert (request.dialect, request.instruction) == ("molmospaces", "open the drawer")
    assert [view[0, 0, 0] for view in request.frames.values()] == [1, 1, 3]
    assert len(request.state) == 8
    reply, _ = decode(write_reply(request, ACTIONS, {}))
    assert reply["arm"].tolist() == ACTIONS[0, :7].tolist() and reply["gripper"].tolist() == [7]


def test_channels_first_frames_are_turned() -> None:
    sent = droid_request(images={"exterior_image_1_left": frame(1).transpose(2, 0, 1)})
    assert read_request(encode(sent, "openpi"), ONE).frames["exterior_image_1_left"].shape == (6, 10, 3)


def test_the_handshake_has_roboarenas_six_keys_and_no_other() -> None:
    assert DROID.metadata() == {
        "image_resolution": (180, 320), "needs_wrist_camera": True, "n_external_cameras": 2,
        "needs_stereo_camera": False, "needs_session_id": True, "action_space": "joint_position",
    }  # fmt: skip
    with pytest.raises(InputError, match="action_space"):
        Contract((), 0, 0, action_space="dance")


def marked(**parts: Any) -> bytes:
    return msgpack.packb({"x": {b"__ndarray__": True, **{key.encode(): value for key, value in parts.items()}}})


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (b"", "no msgpack"),
        (b"\xc1", "no msgpack"),
        (msgpack.packb([1, 2]), "map with text keys"),
        (msgpack.packb({1: 2}), "map with text keys"),
        ("text", "binary msgpack"),
        (b"\x81\xa1x\xdd\xff\xff\xff\xff", "no msgpack"),  # a list that announces 4 thousand million values
        (b"\xdc\x0f\xff" * 2000, "no msgpack"),  # lists in lists
        (msgpack.packb([[0] * 4000] * 20), "more than 65,536 values"),
        (msgpack.packb(msgpack.ExtType(5, b"x")), "extensions"),
        (marked(data=b"1234", dtype="<f4", shape=[2]), "does not have the bytes"),
        (marked(data=b"", dtype="<f4", shape=[2**40, 0]), "sizes from 0 up"),
        (marked(data=b"", dtype="<f4", shape=[-1]), "sizes from 0 up"),
        (marked(data=b"1234", dtype="O", shape=[1]), "are not read"),
        (marked(data=b"1234", dtype="<U1", shape=[1]), "are not read"),
        (marked(data=b"1234", dtype="f4,f4", shape=[1]), "are not read"),
        (marked(data=b"1234", dtype="garbage!", shape=[1]), "written like"),
        (marked(data=b"1234", dtype=7, shape=[1]), "written like"),
        (marked(shape=[1]), "written like"),
        (msgpack.packb({b"nd": True, b"type": "|O", b"kind": b"O", b"shape": [1], b"data": b""}), "objects or records"),
        (encode({"endpoint": "dance"}, "openpi"), "infer or reset"),
        (encode(droid_request(), "openpi"), "no frame of camera 'exterior_image_1_left'"),
        (encode(roboarena_request(prompt=3), "openpi"), "prompt must be a text"),
        (encode(roboarena_request() | {"session_id": ""}, "openpi"), "session_id"),
        (encode(roboarena_request() | {"observation/joint_position": np.zeros(3)}, "openpi"), "have 4 numbers"),
        (encode(roboarena_request() | {"observation/joint_position": ["a"]}, "openpi"), "must hold numbers"),
        (encode(roboarena_request() | {"observation/joint_position": np.full(7, np.nan)}, "openpi"), "finite"),
        (encode(roboarena_request() | {"observation/wrist_image_left": frame(1)[..., 0]}, "openpi"), r"not \[h w 3\]"),
        (encode(roboarena_request() | {"observation/wrist_image_left": np.ones((2, 2, 3))}, "openpi"), "uint8"),
        (encode(roboarena_request() | {"observation/wrist_image_left": frame(1)[None][[0, 0]]}, "openpi"), "as many"),
        (encode(roboarena_request() | {"observation/wrist_image_left": frame(1)[None][:0]}, "openpi"), "sent 0 frames"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_sentence(message: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        read_request(message, DROID)


def test_nothing_is_unpickled() -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("unpickled",))

    trap = pickle.dumps(Trap())
    for kind in (b"O", b"", b"V"):
        with pytest.raises(InputError):
            read_request(
                msgpack.packb({b"nd": True, b"type": b"|O8", b"kind": kind, b"shape": [1], b"data": trap}), DROID
            )


def test_random_damage_never_does_more_than_refuse() -> None:
    chance = random.Random(0)
    whole = encode(roboarena_request(), "openpi")
    for _ in range(3000):
        damaged = bytearray(whole[: chance.randrange(1, len(whole) + 1)])
        for _ in range(chance.randrange(1, 8)):
            damaged[chance.randrange(min(len(damaged), 400))] = chance.randrange(256)
        try:
            read_request(bytes(damaged), DROID)
        except InputError:
            continue


def test_sessions_end_by_reset_by_time_and_to_make_room() -> None:
    sessions = Sessions(max_sessions=3)
    sessions.connect("a")
    sessions.connect("b")
    first = sessions.find("a", None)
    assert sessions.find("a", None) is first and sessions.find("b", None) is not first
    sessions.reset("a", None)
    assert sessions.find("a", None).number == 2
    named = sessions.find("a", "episode")
    sessions.disconnect("a")
    assert len(sessions) == 2
    assert sessions.find("b", "episode") is named  # its client came back on another connection
    sessions.connect("c")
    assert sessions.find("c", "episode") is not named  # a stranger with the same name
    for session in (sessions.find("b", None), sessions.find("c", "episode"), sessions.find("b", "episode")):
        session.memory = Memory("what only the policy reads", 100)
    assert sessions.num_bytes == 300
    sessions.keep_within(200)
    assert len(sessions) == 2 and sessions.num_evicted == 1 and sessions.num_bytes == 200
    assert sessions.find("b", None).number == 5  # b's own went: it was used least recently
    named.num_at_work = 1
    sessions.evict_idle(-1.0)
    assert len(sessions) == 1 and sessions.find("b", "episode") is named
    sessions.find("b", "x").num_at_work = sessions.find("b", "y").num_at_work = 1
    with pytest.raises(InputError, match="all 3 sessions are at work"):
        sessions.find("b", "z")
